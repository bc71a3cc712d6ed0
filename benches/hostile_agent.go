// Answers on the port of an agent as no agent does, one way for each mode. benches/tenants.py runs it in the
// pods of its hostile tenant.
//
//	hostile_agent MODE
package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"
)

// State of an agent that lies about everything that the controller reads.
func lies(version int) []byte {
	long := strings.Repeat("x", 200_000)
	rank := map[string]any{
		"ready": true, "lost": map[string]any{"rank": 1, "message": long, "samples": 1 << 62, "whole": true},
		"detected_loss": []any{1, long},
	}
	state := map[string]any{
		"version": version, "pod": "11111111-2222-3333-4444-555555555555", "devices": 1 << 40,
		"generation": 1, "first": 0, "ranks": []any{rank, rank, rank, rank},
		"committed": map[string]any{"path": "/etc", "step": 1 << 60, "samples": 1 << 62, "batch": 1, "checksum": long},
		"budget":    1, "started": 1e300, "ready": -1e300, "first_step": 1e300,
		"problem":     map[string]any{"reason": long, "message": long, "deterministic": false},
		"waiting_for": long, "log_tail": long,
	}
	body, _ := json.Marshal(state)
	return body
}

func main() {
	mode, version := os.Args[1], 0
	answer := map[string]http.HandlerFunc{
		"endless": func(w http.ResponseWriter, r *http.Request) {
			chunk := []byte(strings.Repeat(" ", 1<<16))
			for {
				if _, err := w.Write(chunk); err != nil {
					return
				}
			}
		},
		"drip": func(w http.ResponseWriter, r *http.Request) {
			for {
				if _, err := w.Write([]byte(" ")); err != nil {
					return
				}
				w.(http.Flusher).Flush()
				time.Sleep(100 * time.Millisecond)
			}
		},
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://10.96.0.1/secret", http.StatusFound)
		},
		"headers": func(w http.ResponseWriter, r *http.Request) {
			for i := 0; i < 64; i++ {
				w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("x", 8192))
			}
		},
		"busy": func(w http.ResponseWriter, r *http.Request) {
			version++
			fmt.Fprintf(w, `{"version": %d}`, version)
		},
		"deep": func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, strings.Repeat(`{"a":[`, 150_000))
		},
		"lies": func(w http.ResponseWriter, r *http.Request) {
			version++
			w.Write(lies(version))
		},
	}[mode]
	if answer == nil {
		fmt.Fprintln(os.Stderr, "unknown mode", mode)
		os.Exit(2)
	}
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		// The kubelet's probes keep the pod alive.
		if r.URL.Path == "/healthz" {
			fmt.Fprintln(w, "ok")
			return
		}
		answer(w, r)
	})
	if err := http.ListenAndServe(":8471", nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
