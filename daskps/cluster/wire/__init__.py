"""What travels between processes, and how it is looked at before it is acted on."""
