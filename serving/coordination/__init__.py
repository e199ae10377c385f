"""What all gateway processes decide together, in Valkey: limits, queues and slots."""
