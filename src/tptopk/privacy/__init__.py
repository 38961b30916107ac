"""The numbers of a private run: its plan, its accounting, its ledger and its statement."""
