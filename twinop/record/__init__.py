"""Op records: schemas, shapes, dtypes, and the checks of a call."""
