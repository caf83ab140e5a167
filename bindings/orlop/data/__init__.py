"""Files of text or conversations -> token files."""
