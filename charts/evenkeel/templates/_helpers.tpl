{{- define "evenkeel.name" -}}
{{- if contains "evenkeel" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-evenkeel{{ end }}
{{- end }}

{{- /* Name of objects outside the release's namespace: a release in another namespace may have the same name. */ -}}
{{- define "evenkeel.clusterName" -}}
{{ include "evenkeel.name" . }}.{{ .Release.Namespace }}
{{- end }}

{{- define "evenkeel.image" -}}
{{ .Values.image }}{{ with .Values.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "evenkeel.labels" -}}
app.kubernetes.io/name: evenkeel-controller
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
