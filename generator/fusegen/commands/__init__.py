"""What the commands do, without printing: functions that return dataclasses; a file per job."""
