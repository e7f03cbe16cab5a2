#!/bin/sh
# Run a workload, judge the run, keep the reports: sh gate.sh WORKLOAD [FLAGS OF walkaway run]
#
# Exit code: 0 pass, 3 a limit is broken, 4 cannot be decided (no pass either), 5 the server died.
# RUN: the run's folder, which must be new. Its gate.xml is the JUnit report; the Markdown table
# goes to the step summary on GitHub, else to gate.md next to it.
set -eu
run=${RUN:-gate-run}

walkaway run "$@" --out "$run" --quiet
walkaway gate "$run" --junit "$run/gate.xml" --markdown "${GITHUB_STEP_SUMMARY:-$run/gate.md}"
