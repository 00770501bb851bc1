"""The demo: one multi-turn coding-agent session over HTTP, with and without speculation."""
