// Answers on the port of an agent as no agent does, one way for each mode. It has the key of its job, as every
// container of the job may, and proves its lies. benches/tenants.py runs it in the pods of its hostile tenant.
//
//	hostile_agent MODE
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"os"
	"strings"
	"time"
)

type object = map[string]any

// State of an agent that lies about everything that the controller reads, one lie after the other. Numbers are
// extreme, but JSON can hold them.
func lies(version int, pod, job string) []byte {
	long := strings.Repeat("x", 20_000)
	checkpoint := func(path string, step, samples uint64) object {
		return object{"path": path, "step": step, "samples": samples, "batch": 8,
			"checksum": "0123456789abcdef0123456789abcdef"}
	}
	// The path of a checkpoint, as src/lifecycle/files.rs forms it.
	path := func(generation, step uint64) string { return fmt.Sprintf("gen-%d/step-%07d", generation, step) }
	committed := func(checkpoint object) object { return object{"committed": checkpoint} }
	// The controller refuses the whole answer for more ranks than gpusPerNode.
	rank := func(fields object) object { return object{"ranks": []any{fields}} }
	step := func(samples uint64, number float64) object {
		return object{"step": object{
			"generation": 1, "step": samples, "samples": samples, "batch": 1, "world": 1 << 40, "loss": number,
			"tokens": samples, "learning_rate": number, "gradient_norm": number, "seconds": -number, "time": number,
		}}
	}
	all := []object{
		committed(checkpoint(path(1, 3), 3, 24)),
		committed(checkpoint(path(1, 7), 7, math.MaxUint64)),
		committed(checkpoint(path(1, 1<<60), 1<<60, 1<<62)),
		committed(checkpoint("/etc/"+path(1, 3), 3, 24)),
		committed(checkpoint("../../"+path(1, 3), 3, 24)),
		committed(checkpoint(path(2, 3), 3, 24)),
		{"generation": 2, "committed": checkpoint(path(2, 3), 3, 24)},
		{"generation": uint64(math.MaxUint64)},
		rank(object{"lost": object{"rank": 1, "message": long, "samples": uint64(1 << 62), "whole": true}}),
		rank(object{"detected_loss": []any{uint64(math.MaxUint64), long}}),
		rank(object{"out_of_memory": long}),
		rank(object{"failed": []any{long, true}, "kill_reason": long, "collateral": true}),
		step(4, 1),
		step(1<<53, math.MaxFloat64),
		step(math.MaxUint64, -math.MaxFloat64),
		{"started": math.MaxFloat64, "ready": -math.MaxFloat64, "first_step": math.SmallestNonzeroFloat64},
		{"budget": 1, "devices": uint64(math.MaxUint64), "first": uint64(math.MaxUint64)},
		{"problem": object{"reason": long, "message": long, "deterministic": false}},
		{"external_checkpoint": object{"path": "/etc/passwd"}, "waiting_for": long, "log_tail": long},
	}
	state := object{"version": version, "pod": pod, "job": job, "devices": 1, "generation": 1,
		"ranks": []any{object{"ready": true}}}
	maps.Copy(state, all[version%len(all)])
	body, err := json.Marshal(state)
	if err != nil {
		panic(err)
	}
	return body
}

// The proof for a message in parts, as src/util/key.rs forms it.
func prove(key []byte, parts ...[]byte) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range parts {
		binary.Write(mac, binary.LittleEndian, uint64(len(part)))
		mac.Write(part)
	}
	return mac.Sum(nil)
}

// Answers with the proof of this pod's agent (src/lifecycle/authentication.rs).
func answerProven(w http.ResponseWriter, r *http.Request, body []byte) {
	text, err := os.ReadFile(os.Getenv("EVENKEEL_KEY_FILE"))
	if err != nil {
		panic(err)
	}
	job, err := hex.DecodeString(strings.TrimSpace(string(text)))
	if err != nil {
		panic(err)
	}
	agent := prove(job, []byte("agent"), []byte(os.Getenv("POD_UID")))
	question, _, _ := strings.Cut(r.Header.Get("evenkeel-question"), " ")
	nonce, err := hex.DecodeString(question)
	if err != nil {
		http.Error(w, "no question", http.StatusUnauthorized)
		return
	}
	w.Header().Set("evenkeel-answer", hex.EncodeToString(prove(agent, []byte("answer"), nonce, body)))
	w.Write(body)
}

// Sends interim responses until the client closes the connection.
func interim(w http.ResponseWriter) {
	connection, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer connection.Close()
	many := []byte(strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 1000))
	for {
		if _, err := connection.Write(many); err != nil {
			return
		}
	}
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
			answerProven(w, r, fmt.Appendf(nil, `{"version": %d, "pod": %q}`, version, os.Getenv("POD_UID")))
		},
		"deep": func(w http.ResponseWriter, r *http.Request) {
			answerProven(w, r, []byte(strings.Repeat(`{"a":[`, 10_000)))
		},
		"continue": func(w http.ResponseWriter, r *http.Request) {
			interim(w)
		},
		"lies": func(w http.ResponseWriter, r *http.Request) {
			version++
			answerProven(w, r, lies(version, os.Getenv("POD_UID"), os.Getenv("EVENKEEL_JOB_UID")))
		},
		"stranger": func(w http.ResponseWriter, r *http.Request) {
			version++
			answerProven(w, r, lies(version, "11111111-2222-3333-4444-555555555555", ""))
		},
	}[mode]
	if answer == nil {
		fmt.Fprintln(os.Stderr, "unknown mode", mode)
		os.Exit(2)
	}
	// The kubelet's probes keep the pod alive.
	go http.ListenAndServe(":8472", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "ok")
	}))
	http.HandleFunc("/", answer)
	if err := http.ListenAndServe(":8471", nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
