"""HTTP: OpenAI's protocol in, engine messages out, text back. It never holds a `Request` or the scheduler."""
