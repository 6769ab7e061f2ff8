"""What tokenmill says about itself, and what its surroundings tell it.

    logging.py       how logs look on the command line
    environment.py   every environment variable we read

Knows none of the parts that speak.
"""
