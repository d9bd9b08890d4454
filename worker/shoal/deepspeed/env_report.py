"""`python -m shoal.deepspeed.env_report`, DeepSpeed's `ds_report`: becomes `shoal doctor`."""

import sys

from shoal.deepspeed.__main__ import hand_over

if __name__ == "__main__":
    hand_over(lambda: ["doctor", *sys.argv[1:]])
