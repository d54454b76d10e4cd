"""The scheduler process: feeds events to the core and obeys its instructions."""
