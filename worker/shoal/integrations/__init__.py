"""Doors for other libraries' scripts. Each needs its library, and nothing else of Shoal imports them."""
