"""Rules that the sources and the documents of the repository keep. No job is started here."""
