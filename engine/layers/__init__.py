"""The layers that decoders are made of; each reads its weights from what the loader prepared."""
