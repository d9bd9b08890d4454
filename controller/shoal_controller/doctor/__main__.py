"""`python -m shoal_controller.doctor CHECK,CHECK GIVEN`: a line of JSON for each (`shoal_protos.finding`)."""

import sys

from shoal_protos.finding import main_of

from shoal_controller.doctor.controller_checks import CHECKS as OF_CONTROLLER
from shoal_controller.doctor.machine_checks import CHECKS as OF_MACHINE

if __name__ == "__main__":
    sys.exit(main_of({**OF_MACHINE, **OF_CONTROLLER}, sys.argv[1:]))
