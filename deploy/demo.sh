#!/usr/bin/env bash
# Starts `octavo serve`, asks it one question, shows the answer as it is made, shuts the server down.
# Called by `make demo` with BIN, MODEL, PORT and QUESTION.
set -euo pipefail

address="127.0.0.1:$PORT"
if "$BIN/octavo" health "$address" >/dev/null 2>&1; then
  echo "a server runs at $address already; make demo DEMO_PORT=... chooses another port" >&2
  exit 1
fi
log=$(mktemp)
"$BIN/octavo" serve --model "$MODEL" --port "$PORT" 2>"$log" &
server=$!

stop() {
  status=$?
  ended=0
  kill -TERM "$server" 2>/dev/null || true
  wait "$server" || ended=$?
  [ "$status" -ne 0 ] || status=$ended
  [ "$status" -eq 0 ] || { echo "what the server said:" >&2; cat "$log" >&2; }
  rm -f "$log"
  exit "$status"
}
trap stop EXIT
trap 'exit 130' INT TERM

echo "Starting a scheduler and a worker with $MODEL on $address"
for _ in $(seq 200); do
  "$BIN/octavo" health "$address" >/dev/null 2>&1 && break
  kill -0 "$server" 2>/dev/null || { echo "the server ended before it was ready" >&2; exit 1; }
  sleep 0.3
done

printf '\n> %s\n' "$QUESTION"
"$BIN/octavo" chat "$QUESTION" --address "$address" --stats
