#!/bin/sh
# Counts the samples in data/genotypes.csv that have 0, 1 and 2 copies of one variant. Usage: count.sh rs1023
set -eu
awk -F, -v variant="$1" '
    NR == 1 {
        for (i = 1; i <= NF; i++) if ($i == variant) column = i
        if (!column) { print "no variant " variant > "/dev/stderr"; exit 1 }
        next
    }
    { copies[$column]++ }
    END { if (column) for (c = 0; c <= 2; c++) print c, copies[c] + 0 }
' data/genotypes.csv > counts.txt
cat counts.txt
