"""APIs that are not the engine's own: their bodies made into chat completions, and chat answers told in their words."""
