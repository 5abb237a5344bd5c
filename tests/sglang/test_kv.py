#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The elastic KV Cache of the SGLang plugin without a server: both parts in one process, since importing
SGLang takes longer than the tests do."""

import sys
import unittest

if __name__ == "__main__":
    loader = unittest.TestLoader()
    suite = loader.loadTestsFromNames(["test_kv_units", "test_kv_scheduler"])
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
