"""Lines of metrics, the ledger, loggers and the console."""
