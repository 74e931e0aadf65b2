//! Margins and verdicts: does the bundle still answer like the checkpoint?
