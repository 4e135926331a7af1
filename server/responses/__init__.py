"""The Responses API: conversations that the server can remember."""
