"""The decoder and its files: Llama, Qwen2, Qwen3 and SmolLM families, dense, on plain torch."""
