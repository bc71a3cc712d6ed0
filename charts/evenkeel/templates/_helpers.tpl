{{- define "evenkeel.name" -}}
{{- if contains "evenkeel" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-evenkeel{{ end }}
{{- end }}

{{- define "evenkeel.image" -}}
{{ .Values.image }}{{ with .Values.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "evenkeel.labels" -}}
app.kubernetes.io/name: evenkeel-controller
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
