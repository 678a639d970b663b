"""One Prefect task a stage: its policies, one call into the library, one artifact; nothing is computed here."""
