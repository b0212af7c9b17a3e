# Writes the linker's version script of the shared library. It exports a symbol if public headers, or headers that these
# include, have each part of its name: so mica::Tensor::item(), but no kernel and nothing of fmt or libbacktrace.
#
#     awk -v nm=NM -v objects=FILE -v include=FOLDER -v version=mica_0.2 -v output=FILE -f exports.awk HEADERS...
#
# FILE has the paths of the objects, one per line.

# Remembers the identifiers in a header and reads what it includes.
function read_header(file, line, words, n, i) {
  if (file in seen) return
  seen[file] = 1
  while ((getline line < file) > 0) {
    if (match(line, /^#include <mica\/[^>]*>/)) {
      left[++queued] = include "/" substr(line, RSTART + 10, RLENGTH - 11)
      continue
    }
    sub(/\/\/.*/, "", line)
    n = split(line, words, /[^A-Za-z0-9_]+/)
    for (i = 1; i <= n; ++i) named[words[i]] = 1
  }
  close(file)
}

# Whether public headers have all identifiers in what follows each match of `start` in a mangled name: `start` is a
# namespace, the identifiers are those of 2nn6LinearC1El.
function is_public(rest, start, length_of_name) {
  while (match(rest, start)) {
    rest = substr(rest, RSTART + RLENGTH)
    while (match(rest, /^[0-9]+/)) {
      length_of_name = substr(rest, 1, RLENGTH) + 0
      if (!(substr(rest, RLENGTH + 1, length_of_name) in named)) return 0
      rest = substr(rest, RLENGTH + 1 + length_of_name)
    }
  }
  return 1
}

# Whether it is a function or data of mica, a table or type information of a class, or the guard of a static variable.
# Programs have their own copies of templates and inline functions (V, W, u), so these are exported only if their
# arguments are public, too; NS_ and the like stand for a namespace that came before.
function is_exported(name, kind) {
  return name ~ /^_Z(T[VIST]|GV|T[hvc][n0-9_]*)?Z?N[rVK]*[RO]?4mica/ && is_public(name, "4mica") &&
         (kind ~ /[BDRT]/ || is_public(name, "NS[0-9A-Z]*_"))
}

BEGIN {
  for (i = 1; i < ARGC; ++i) left[++queued] = ARGV[i]
  while (++done <= queued) read_header(left[done])
  print version " {\n  global:" > output
  command = nm " -P -g --defined-only @" objects
  while ((command | getline line) > 0) {
    split(line, symbol, " ")
    if (!(symbol[1] in known) && is_exported(symbol[1], symbol[2])) {
      print "    " symbol[1] ";" > output
      ++exported
    }
    known[symbol[1]] = 1
  }
  print "  local: *;\n};" > output
  if (!exported) {
    print "exports.awk: found nothing to export with " command > "/dev/stderr"
    exit 1
  }
}
