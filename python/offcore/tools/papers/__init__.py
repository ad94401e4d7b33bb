"""Published numbers beside those of this project."""
