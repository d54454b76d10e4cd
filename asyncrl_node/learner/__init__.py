"""The learner process: takes groups, trains, publishes weights."""
