"""One job on one host: how it starts, what its ranks see, what it prints, and what commands say of it."""
