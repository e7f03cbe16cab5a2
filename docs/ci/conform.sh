#!/bin/sh
# Check how a server cancels, keep the page and the reports: sh conform.sh FLAGS OF walkaway conform
#
# Exit code: 0 no new failure, 3 a new one (or an expected one that passes), 5 the server failed.
# 4, a case that could not be decided, is a warning unless FAIL_ON_UNDECIDED is true.
# RUN: the folder of the result, which must be new. Next to it stand the JUnit report RUN.xml and,
# except on GitHub, where it goes to the step summary, the Markdown table RUN.md.
set -eu
run=${RUN:-conform-run}

code=0
walkaway conform "$@" --out "$run" --junit "$run.xml" \
  --markdown "${GITHUB_STEP_SUMMARY:-$run.md}" || code=$?
if [ "$code" = 4 ] && [ "${FAIL_ON_UNDECIDED:-false}" != true ]; then
  echo "::warning::walkaway conform could not decide every case: see $run/index.html"
  code=0
fi
exit "$code"
