#!/bin/sh
# Process 1 of a rank. Its argument is the working directory; without one the workspace is copied into the current directory.
run=/b10/run; shell=$(command -v bash || echo sh); code=0 stopped= child= end=
begin() { eval "$environment"; exec "$1" -c "$2"; }     # in a subshell, so that the user's PATH is not ours
now() { date +%s 2>/dev/null || echo 0; }
term() { end=${end:-$(($(now) + 30))}; kill -TERM -1 2>/dev/null; }             # to every process of the rank but this one
pause() { sleep 0.1; [ "$(now)" -lt "$end" ] || kill -KILL -1 2>/dev/null; }    # after 30 s by force
trap 'stopped=1; term' TERM
exec >>"$run/output" 2>&1
[ ! -p "$run/alive" ] || exec 9<>"$run/alive"           # held to the end: the reader learns of it also after SIGKILL. <> never blocks
environment=$(cat "$run/env") && rm "$run/env" || exit 97
[ -n "$1" ] || cp -a /b10/workspace/. . || exit 97; cd "${1:-.}" || exit 97
: >"$run/ready"
until [ -e "$run/go" ] || [ -n "$stopped" ]; do sleep 0.05; done
for file in "$run"/command.*; do
    [ -n "$stopped" ] && code=143 && break
    begin "$shell" "$(cat "$file")" & child=$!
    [ -z "$stopped" ] || term                           # stopped since the line before the last: the trap missed this child
    code=143
    while kill -0 "$child" 2>/dev/null; do
        if [ -n "$stopped" ]; then pause; else wait "$child"; code=$?; fi       # a trapped signal ends it early, with 143
    done
    if [ "$code" = 143 ]; then wait "$child" 2>/dev/null; again=$?; [ "$again" = 127 ] || code=$again; fi
    [ "$code" = 0 ] || break                            # the first failure ends the rank
done
[ -n "$stopped" ] || term                               # to what the commands left in the background
while kill -0 -1 2>/dev/null; do pause; done
echo "$code" >"$run/exit_code.tmp" && mv "$run/exit_code.tmp" "$run/exit_code"
exit "$code"
