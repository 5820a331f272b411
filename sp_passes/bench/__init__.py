# SPDX-License-Identifier: Apache-2.0
"""Benchmarks; ``sp-passes bench`` prints them."""
