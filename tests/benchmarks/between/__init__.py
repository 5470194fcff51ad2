"""What calls between machines take, beside bare sockets doing the same work."""
