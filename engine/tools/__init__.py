"""Function calling: which functions a chat may call, how the model is told, and how its calls are read."""
