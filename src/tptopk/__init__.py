"""Train PyTorch models from scratch on sensitive data under differential privacy."""
