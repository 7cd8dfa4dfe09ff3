"""Replay golden folders through the public functions: `python -m tests.goldens DIR... [--kind KIND]`.

Each golden.json is a reference implementation's own output; `target` says what of a case must be equal. A case this
package cannot express counts as a mismatch, so nothing is passed over in silence.
"""
