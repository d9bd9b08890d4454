"""OpenSSL's numbers of what is wrong with a certificate, as Python's `ssl` does not name them (`verify_code`).

From x509_vfy.h (`X509_V_ERR_…`). Both sides turn them into sentences of their own.
"""

NOT_YET_VALID, EXPIRED = 9, 10
OTHER_NAMES = (62, 64)
"""It is for other hosts, or for other addresses."""
UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)

AGAINST_RFC_5280 = range(80, 94)
"""Parts of it are missing or contradict each other. Looked at where the check is strict, as in Python from 3.13 on."""
