"""Jobs on device ``tpu``, and its operations beside those of the CPU."""
