"""`manage.py up`: everything of one installation in one terminal, started and stopped in order."""
