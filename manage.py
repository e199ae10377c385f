#!/usr/bin/env python3
"""The one command line of Fanlight: `python manage.py up` serves, `python manage.py help` lists the rest."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:  # a setting; the message says which, a traceback would hide it
        sys.exit(str(error))
