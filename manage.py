#!/usr/bin/env python3
"""The one command line of Fanlight: `python manage.py up` serves, `python manage.py help` lists the rest."""

import os
import sys


def main() -> None:
    import django
    from django.core.management import execute_from_command_line

    if sys.argv[1:2] != ["version"]:
        execute_from_command_line(sys.argv)
        return
    django.setup()  # Django would answer "version" with its own
    from console.base.management.commands.version import Command

    Command().run_from_argv(sys.argv)


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
    from django.core.exceptions import ImproperlyConfigured

    try:
        main()
    except BrokenPipeError:  # `manage.py transitions | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ImproperlyConfigured as error:  # a setting; the message says which, a traceback would hide it
        sys.exit(str(error))
