"""The garbage collector of a controller's process: what lasts as long as the process is not looked through again.

What is imported is some 200,000 objects. To look through them all takes 0.1 s, in which no heartbeat is heard, and with
a thousand workers that came every few seconds. Called by the `controller` command, once it serves.
"""

from __future__ import annotations

import gc

THRESHOLDS = (5_000, 20, 100)
"""New objects that are not gone again, and rounds, before new, young and old ones are looked through. What workers say
takes the place of what they said before, and is gone without a search.
"""


def spare_what_lasts() -> None:
    """From now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
