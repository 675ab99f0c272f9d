"""Our own launcher: starts ranks here and over ssh, and starts lost ones again. No torch."""
