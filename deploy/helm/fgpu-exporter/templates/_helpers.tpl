{{- define "fgpu-exporter.selectorLabels" -}}
app.kubernetes.io/name: fgpu-exporter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fgpu-exporter.labels" -}}
{{ include "fgpu-exporter.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "fgpu-exporter.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "fgpu-exporter.priorityClassName" -}}
{{ .Values.priorityClass.name | default (.Values.priorityClass.create | ternary .Release.Name "") }}
{{- end }}
