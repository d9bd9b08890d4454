"""Data and random numbers of the lanes: the same for whoever trains them."""
