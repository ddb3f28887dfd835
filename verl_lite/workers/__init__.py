"""What each role does on its rank: plain classes, built in a test without Ray."""
