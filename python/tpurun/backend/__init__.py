"""The process groups of torch on this engine: how they are made, and what their ranks share."""
