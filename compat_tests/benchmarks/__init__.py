"""What logging costs, measured against the same training without it.

``python -m compat_tests.benchmarks`` runs on any line of the matrix.
"""
