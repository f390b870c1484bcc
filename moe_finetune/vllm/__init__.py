"""Everything that knows vLLM: its installation, engine, server and plugin."""
