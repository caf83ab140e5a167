#!/usr/bin/env bash
# Two hosts on one machine: each with a network and a host name of its own, joined by a cable (a veth
# pair). Needs root, or user namespaces. Everything lives in namespaces of its own: when this program
# ends, however it ends, its processes, both networks and Open MPI's files are gone.
#   two_hosts.sh check                     ends with 0 where the machine allows it; else says why not
#   two_hosts.sh run RANKS HOW COMMAND     runs RANKS ranks of COMMAND on each host over the cable; HOW
#                                          is mpiexec's path, or "sockets"; prints "cable BYTES": what
#                                          went over it
#   two_hosts.sh part FOLDER HOW COMMAND   runs one rank on each, cuts the cable when FOLDER/trained is
#                                          there and ends when FOLDER/ended-0 and -1 are
set -euo pipefail

readonly address_a=192.0.2.1 address_b=192.0.2.2
readonly here=$(realpath "$0")

# What Open MPI calls instead of ssh, `enter HOST COMMAND`: runs COMMAND on the other host.
if [[ $1 == enter ]]; then
  exec nsenter --target "$ORLOP_OTHER_HOST" --net --uts bash -c "${*:3}"
fi

if [[ $1 != inside ]]; then
  as_root=()
  [[ $(id -u) -eq 0 ]] || as_root=(--map-root-user)
  exec setpriv --pdeathsig KILL unshare "${as_root[@]}" --pid --fork --kill-child --mount-proc --net --uts \
    "$here" inside "$@"
fi
shift

connect() {  # ADDRESS: of the host that runs this
  ip link set lo up
  ip address add "$1/24" dev cable
  ip link set cable up
}

# Where Open MPI keeps what it shares between processes.
for folder in /run /dev/shm; do mount -t tmpfs tmpfs "$folder"; done

# The other host lives as long as the process that holds it.
hostname orlop-a
coproc other { exec unshare --net --uts bash -c 'hostname orlop-b; echo made; exec sleep infinity'; }
export ORLOP_OTHER_HOST=$other_PID
read -r -u "${other[0]}" made
[[ $made == made ]]
ip link add cable type veth peer name cable netns "$ORLOP_OTHER_HOST"
connect "$address_a"
export -f connect
nsenter --target "$ORLOP_OTHER_HOST" --net --uts bash -euc "connect $address_b"

launch_by_sockets() {  # RANKS COMMAND...
  local started=() enter rank
  for ((rank = 0; rank < 2 * $1; rank++)); do
    enter=()
    ((rank < $1)) || enter=(nsenter --target "$ORLOP_OTHER_HOST" --net --uts)
    "${enter[@]}" env RANK=$rank WORLD_SIZE=$((2 * $1)) LOCAL_RANK=$((rank % $1)) \
      ORLOP_RENDEZVOUS="$address_a:29400" "${@:2}" &
    started+=("$!")
  done
  for rank in "${started[@]}"; do wait "$rank"; done
}

launch() {  # RANKS HOW COMMAND...
  if [[ $2 == sockets ]]; then
    launch_by_sockets "$1" "${@:3}"
    return
  fi
  "$2" --host "$address_a:$1,$address_b:$1" --oversubscribe --bind-to none --enable-recovery \
    --mca orte_tmpdir_base /run --mca plm rsh --mca plm_rsh_agent "$here enter" --mca oob_tcp_if_include cable \
    --mca btl self,vader,tcp --mca btl_tcp_if_include cable --mca btl_vader_single_copy_mechanism none \
    "${@:3}"
}

wait_for() {  # SECONDS FILE
  local end=$((SECONDS + $1))
  until [[ -e $2 ]]; do
    [[ $SECONDS -lt $end ]] || { echo "no '$2' after $1 s" >&2; return 1; }
    sleep 0.05
  done
}

case $1 in
  check) ;;
  run)
    launch "${@:2}"
    awk '$1 == "cable:" { print "cable", $2 + $10 }' /proc/net/dev
    ;;
  part)
    launch 1 "${@:3}" &
    wait_for 30 "$2/trained"
    ip link set cable down
    wait_for 40 "$2/ended-0"
    wait_for 40 "$2/ended-1"
    ;;
esac
