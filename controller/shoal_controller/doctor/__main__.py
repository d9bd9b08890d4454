"""`python -m shoal_controller.doctor CHECK,CHECK GIVEN`: a line of JSON for each (`shoal_protos.finding`)."""

import sys

from shoal_protos.finding import main_of

from shoal_controller.doctor.checks import CHECKS

if __name__ == "__main__":
    sys.exit(main_of(CHECKS, sys.argv[1:]))
