"""Messages between processes, and the checks of each before it is acted on."""
